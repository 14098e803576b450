"""One rank of two: calls each kind of function that is recorded; rank 1 is killed in the end."""

import contextlib
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
peer = 1 - rank
dist.barrier(group=dist.group.WORLD)
host = dist.new_group([0, 1], backend="gloo", group_desc="HOST")
local = dist.new_group([0, 1], use_local_synchronization=True)
dist.new_group([0])


def exchange(tensor_send_next, tensor_recv_prev):
    send = dist.P2POp(dist.isend, tensor_send_next, peer)
    receive = dist.P2POp(dist.irecv, tensor_recv_prev, peer)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()


received = torch.zeros(3)
exchange(torch.ones(3), received)
assert received.tolist() == [1.0, 1.0, 1.0]

number = torch.zeros(1)
if rank == 0:
    dist.send(number, 1, group=local)
    dist.isend(number, group=host, group_dst=1).wait(timedelta(seconds=60))
else:
    dist.recv(number, 0, group=local)
    dist.irecv(number, group=host, group_src=0).wait(timedelta(seconds=60))
assert number.item() == 0.0

work = dist.all_reduce(number, async_op=True, group=host)
assert isinstance(work, dist.Work)
work.wait()
assert work.is_completed()
dist.all_gather_object([None, None], "something")
with distributed_c10d._coalescing_manager(async_ops=True) as manager:
    dist.all_reduce(number)
    dist.all_reduce(number)
manager.wait()
with contextlib.suppress(AssertionError, RuntimeError):
    # Where there is no CUDA it raises, having been recorded.
    torch.cuda.synchronize()
dist.barrier()
if rank == 1:
    dist.irecv(number, 0)
    os.kill(os.getpid(), signal.SIGKILL)
