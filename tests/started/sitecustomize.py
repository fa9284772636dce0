"""Python's settings in programs that tests start; Python imports this file before the program.

Importing and tracing make many objects and no garbage: by default, a tenth of the time that such a
program takes goes to the search for some.
"""

import gc

gc.set_threshold(100_000, 50, 50)
