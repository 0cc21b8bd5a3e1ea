"""The hidden-state store: raw-file speed, any zarr v3 reader opens it, safe against a kill at any moment.

1. `lock.RunLock`              one writing run a store
2. `recover.recover`           leftovers of a killed run are deleted; what is committed is returned
3. `samples.SamplesWriter`     prepared samples -> samples.arrow
4. `manifest.write_manifest`   what the numbers are -> manifest.json (`checksums` for the other root files)
5. `writer.ShardWriter`        rows of each sample -> shards/*.zarr + index/*.parquet, committed one by one
6. `reader.HiddenStore`        sample -> its rows, one `preadv` a layer
7. `verify.verify`             every byte against its hash

`layout` holds the names and the byte layout, `disk` the prediction of sizes, `files` durable writing.
"""
