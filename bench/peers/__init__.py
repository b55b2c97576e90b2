"""What `bench.bench_step` compares: one file per contestant, and the worker process that runs one of them."""
