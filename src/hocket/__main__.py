"""`python -m hocket`: the same as the command `hocket`."""

import sys

from hocket.cli import main

sys.exit(main())
