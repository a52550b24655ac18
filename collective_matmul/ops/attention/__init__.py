"""Attention on one device, by the fastest kernel that there is.

================  ==========================================================================
file              what it is
================  ==========================================================================
attend            `dot_product_attention`, its gradients, and the two plain functions
argument_checks   what is refused, by sentences
request           a call as data
segments          parts of sequences that attend to themselves only, such as documents
choice            which kernel: requested, or measured to be the fastest
kernel            the contract of a kernel; then one file for each:
flash_attention     FlashAttention-3, an optional package
cudnn_attention     cuDNN by JAX's public function; segments by `cudnn_packs`
xla_attention       XLA's matmuls: the reference
================  ==========================================================================
"""
