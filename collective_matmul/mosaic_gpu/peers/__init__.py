"""Memory of peer GPUs: how the host shares it, and how kernels store, signal and wait in it.

The input is the devices of a program. The outputs are addresses of the peers' arrays, for kernels,
and reports about peers that do not come.

- On the host: symmetric_workspace, shared_memory, virtual_memory, process_group, timeout_reports.
- In kernels: peer_memory, remote_store, peer_waits, rendezvous.
"""
