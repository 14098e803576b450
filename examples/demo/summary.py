"""Says what a demo run showed; exits with an error unless the loss went down."""

import importlib.metadata
import re
import sys
from pathlib import Path

import megatron.core

_LOSS = re.compile(r"iteration +(\d+)/.*lm loss: ([0-9.E+-]+)")
_LENGTHS = re.compile(r"tokens in documents: .*")


def main(log_path: str) -> None:
    """Print the summary of the run that wrote the log at ``log_path``.

    Raises:
        SystemExit: The log has no two losses, or the last is not below the first.
    """
    log = Path(log_path).read_text()
    losses = [(int(iteration), float(loss)) for iteration, loss in _LOSS.findall(log)]
    if len(losses) < 2:
        raise SystemExit(f"{log_path} has {len(losses)} losses: the run did not train; read it")
    (first_iteration, first), (last_iteration, last) = losses[0], losses[-1]
    print(f"megatron-core {importlib.metadata.version('megatron-core')}")
    print(f"megatron.core from {Path(megatron.core.__file__).parent}")
    print(f"microbatches of the last step, {_LENGTHS.findall(log)[-1]}")
    print(f"lm loss {first:.3f} at iteration {first_iteration}, {last:.3f} at {last_iteration}")
    if not last < first:
        raise SystemExit("the loss did not go down")


if __name__ == "__main__":
    main(sys.argv[1])
