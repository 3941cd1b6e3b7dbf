"""Grammars: the tokens allowed next in a sequence, if its request asks for JSON, a regular expression or another grammar.

`following` knows one sequence, `grammars` all that live and the masks of a pass.
"""
