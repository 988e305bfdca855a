"""Short real training runs with an injected, known cause of waiting, graded by StallDetector's verdict.

``python -m tests.faults`` (or ``make test-faults``) runs them all and prints the score table.
"""
