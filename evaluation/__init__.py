"""Short real training runs with an injected, known cause of waiting, graded by StallDetector's verdict.

``python -m evaluation`` (or ``make test-faults``) runs them all and prints the score tables; ``--cpu`` those in which
the training process waits, ``--gpu`` those in which a simulated GPU does, whose ledger is the truth.
"""
