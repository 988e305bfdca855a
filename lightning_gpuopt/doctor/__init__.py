"""What in this environment will hold a GPU back: pure checks (numbers in, ``Check`` out), and gatherers of numbers."""
