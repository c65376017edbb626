"""Engines that outlive a controller that dies (`train.keep_workers`)."""
