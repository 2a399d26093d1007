"""The command line: parse, call the API, print.

The modules here import nothing slow at their top, neither ONNX nor the runtime nor rich, so that ``--help`` and a typo
answer at once; what a command needs it imports when it runs.
"""
