"""The version of Evener."""

VERSION = "0.1.0"
