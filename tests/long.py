"""A mark for tests that take long: they run with HOCKET_LONG=1 only.

HOCKET_LONG=1 pytest tests/test_{chaos,soak,two_hosts}.py tests/runtime/test_failure_launched.py
"""

from __future__ import annotations

import os

import pytest

long = pytest.mark.skipif(not os.environ.get("HOCKET_LONG"), reason="takes long; run it with HOCKET_LONG=1")
