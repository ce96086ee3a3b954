"""The version of hocket."""

VERSION = "0.1.0"
