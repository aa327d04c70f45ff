"""Raw Triton kernels, nothing public. Importing this imports no Triton; a module here does so when it is needed."""
