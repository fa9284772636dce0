"""Settings for programs that tests start. Python imports this file before the program.

Imports and tracing create many objects but no garbage. By default, garbage collection takes a tenth
of a program's time.
"""

import gc

gc.set_threshold(100_000, 50, 50)
