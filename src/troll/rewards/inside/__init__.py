"""What runs in the sandbox beside model-written code. These modules are sent there as text.

They share their process with that code, so nothing they say is trusted, and nothing they know is worth stealing: no
expected result is ever here. They import only the standard library and each other.
"""
