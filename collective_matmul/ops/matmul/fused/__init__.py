"""The fused kernels: their launches, bodies and configurations.

The input is a request with its operands; the output is the product. For each of the two kernels,
NAME is its launch, NAME_kernel and NAME_sender its body, NAME_config and NAME_search its
configurations.
"""
