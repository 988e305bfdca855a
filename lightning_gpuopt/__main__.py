"""``python -m lightning_gpuopt``."""

from lightning_gpuopt.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
