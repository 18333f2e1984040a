"""How long the tests that can be long are: ``make soak`` multiplies their counts."""

import os

SCALE = int(os.environ.get("PDD_SOAK_SCALE", "1"))
EXAMPLES = min(SCALE, 50)
"""For Hypothesis: beyond this many times its usual number of examples it finds little more."""
