"""`python -m dflash_tool`: the same as the `dflash` console script (and what torchrun starts)."""

from dflash_tool.cli import main

if __name__ == "__main__":
    main()
