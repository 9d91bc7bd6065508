"""The messages between the front process and the ranks, and from rank 0 to its peers.

All are msgspec structs, sent as MessagePack over ZMQ; a struct's name is its tag on the wire.
Token ids are plain ints, times are seconds.
"""
