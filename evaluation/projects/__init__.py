"""Ten public projects on Lightning, trained as their quick starts do, with and without ``watch``."""
