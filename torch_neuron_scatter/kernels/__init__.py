"""NKI kernels, one a file.

A file here imports `nki` and other kernels, nothing else: NKI traces the Python of a kernel, and a kernel must compile
where torch is absent. Use only calls, arguments and dtypes that NKI 0.7 documents.
"""
