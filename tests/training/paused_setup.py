"""train.py that pauses in a phase of its setup: python paused_setup.py PHASE FILE SECONDS FLAGS...

When a process enters the function PHASE of ``training/prepare.py``, it creates FILE and sleeps. A
process that is silent for SECONDS counts as dead.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformer_jax.devices import distributed
from transformer_jax.training import __main__, prepare

if __name__ == "__main__":
    phase, file, seconds, *flags = sys.argv[1:]
    distributed._HEARTBEAT_SECONDS = int(seconds)
    function = getattr(prepare, phase)

    def paused(*given: Any, **named: Any) -> Any:
        """Sleep as a slow phase would."""
        Path(file).touch()
        time.sleep(600)
        return function(*given, **named)

    setattr(prepare, phase, paused)
    sys.exit(__main__.main(flags))
