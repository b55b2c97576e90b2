"""`python -m tests.rank_launcher train ...`: the launcher, whose ranks are `tests.rank_program`. For test_launch.py."""

import sys

from dflash_graph import train_command
from dflash_graph.__main__ import main
from dflash_graph.launch import launch

if __name__ == "__main__":
    train_command.launch = (
        lambda command, *args, **kwargs: launch(  # type: ignore[assignment]
            ["-m", "tests.rank_program", *command[2:]], *args, **kwargs
        )
    )
    sys.exit(main())
