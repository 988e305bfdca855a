"""Imported before torch, whose thread pool would burn most of the CPU time in waiting for the next small tensor."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
