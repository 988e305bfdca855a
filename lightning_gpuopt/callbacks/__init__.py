"""The five public callbacks, one class a file: they check arguments, and pass hooks on."""
