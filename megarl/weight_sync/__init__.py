"""Weights from the trainer to the engines.

The trainer's rank 0 owns a `WeightSender`; every engine worker owns a `WeightReceiver`. They meet
in an `ExchangeSession` (plain values, so it travels through any transport). A version travels in
buckets, from host to host (`relay.py`); it counts when every receiver has acknowledged every bucket with the sender's fingerprint
and has finished loading: both sides then hold equal `UpdateReport`s.

Or, planned, every trainer rank owns a `PlannedSender` and every engine rank a `PlannedReceiver`: each box of a tensor
goes to where it is needed, and nowhere else; see docs/architecture.md.

    sender = WeightSender.open(host, endpoints, bucket_bytes=..., timeout=...)
    engine.connect_exchange(sender.session)
    sender.send(1, weights)          # at the same time as engine.update_weights(1)
"""
