"""``python -m pdd.cli``: the command where the ``pdd`` script is not on the PATH."""

import sys

from pdd.cli.main import main

sys.exit(main())
