"""Frozen structs that all packages share: descriptions of models, machines and plans, the record of a run, its
events and its errors. They depend on no other package.
"""
