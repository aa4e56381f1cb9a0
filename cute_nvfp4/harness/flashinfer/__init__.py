"""FlashInfer-Bench's records: reads Definition and Solution, writes Trace (docs/reference/flashinfer_bench.md)."""
