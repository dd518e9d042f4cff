"""NKI kernels, one a file, and what they share.

grouped      several tiles of 128 rows side by side; any number of rows
stationary   input of few rows stays on the chip
scatter_add  one tile after another, one rounding for each row of input
planner      which of them, and with which tile sizes
special      non-finite elements and signs of zero, which a matmul cannot sum
tiles        loops over rows, addresses, the index check, the exact sum of a tile

A file here imports `nki` and other files of this folder, nothing else: NKI traces the Python of a kernel, and a kernel must compile
where torch is absent. The planner imports no nki. Use only calls, arguments and dtypes that NKI 0.7 documents.
"""
