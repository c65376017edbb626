"""Weight sync: send new weights from the trainers to the engines.

`update_engines` in `placement.py` starts an update: `publish.py` calls the trainers' senders and the engines' receivers at the same
time; vLLM's workers load the weights (`engines/vllm/worker.py`). `connect.py` chooses one of two routes when it opens a session:

- sharded (`weight_sync.route: sharded`): every trainer rank has a `ShardedSender`, every engine rank a `ShardedReceiver`. Each
  slice of a tensor goes only to the engine ranks that need it.
- full (`weight_sync.route: full`): the trainers' rank 0 has a `FullSender` and sends all weights as whole tensors; every
  engine rank has a `FullReceiver`.

Both sides join a session (`session.py`: plain values, so it travels through any transport). Weights travel in buckets, which
`outgoing.py` holds and `incoming.py` receives for both routes. An update succeeds only if every receiver has acknowledged
every bucket with the sender's fingerprint and has loaded it: the reports of both sides are then equal. See
docs/architecture.md.

    sender = FullSender.open(host, receivers, bucket_bytes=..., timeout=..., heartbeat_timeout=...)
    engine.connect_weight_sync(sender.session)
    sender.send(1, export)          # at the same time as engine.update_weights(1)
"""
