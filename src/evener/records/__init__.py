"""Frozen structs that all packages share: the nouns of a run, its events and its errors. They depend on no other
package.
"""
