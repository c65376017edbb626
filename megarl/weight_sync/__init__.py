"""Weights from the trainer to the engines.

The trainer's rank 0 owns a `FullSender`; every engine worker owns a `FullReceiver`. They meet
in an `FullSession` (plain values, so it travels through any transport). A version travels in
buckets, from host to host (`relay.py`); it counts when every receiver has acknowledged every bucket with the sender's fingerprint
and has finished loading: both sides then hold equal `FullReport`s.

Or, planned, every trainer rank owns a `ShardedSender` and every engine rank a `ShardedReceiver`: each box of a tensor
goes to where it is needed, and nowhere else; see docs/architecture.md.

    sender = FullSender.open(host, endpoints, bucket_bytes=..., timeout=...)
    engine.connect_exchange(sender.session)
    sender.send(1, weights)          # at the same time as engine.update_weights(1)
"""
