"""Grammars: the tokens that a sequence may get next, where its request asks for JSON, a regular expression or another grammar.

`following` knows one sequence, `grammars` all that live and the masks of a pass.
"""
