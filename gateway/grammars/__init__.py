"""Grammars of answers: clients' formats become llguidance's text, checked before any worker sees it.

`wanted` has a function for each form that clients use; `maker` asks a process, `child`, to convert it (`forms`) and to build it:
a hostile grammar may take all memory or never end.
"""
