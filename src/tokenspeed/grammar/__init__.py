"""Structured output: from a grammar's source to the tokens that may come next, with xgrammar.

A grammar is compiled once, apart from the engine (`worker`), and reaches every rank in compiled form, in the one
stream of messages. So all ranks begin a request at the same point, and none of them ever waits for a compiler.
Each rank then follows its requests' tokens for itself (`state`): that depends on nothing else, so the ranks agree.
"""
