"""Settings for programs that tests start. Python imports this file before the program.

Imports and tracing create many objects but no garbage. By default, garbage collection takes a tenth
of a program's time. TensorBoard's writer imports PyTorch if it is installed, but does not need it;
in train.py, that takes a quarter of a short run's time.
"""

import gc
import sys


class WithoutPyTorch:
    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch":
            raise ModuleNotFoundError(name)


gc.set_threshold(1_000_000, 20, 50)
if any(word.endswith("train.py") for word in sys.orig_argv[:2]):
    sys.meta_path.insert(0, WithoutPyTorch())  # type: ignore[arg-type]
