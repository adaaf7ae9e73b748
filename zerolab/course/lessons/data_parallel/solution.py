"""Solutions of lesson 03's exercises."""

import torch
import torch.distributed as dist


def average_gradients(parameters, count):
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    # flatten() goes by elements, and copy_ writes them back into whatever layout the gradient has
    pieces = [count * parameter.grad.flatten() for parameter in parameters]
    flat = torch.cat([*pieces, pieces[0].new_tensor([count])])
    dist.all_reduce(flat)
    *sums, total = flat.split([*(piece.numel() for piece in pieces), 1])
    for parameter, summed in zip(parameters, sums, strict=True):
        parameter.grad.copy_((summed / total).view_as(parameter))


def average_in_buckets(gradients, bucket_bytes):
    def send(bucket):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, piece in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(piece.view_as(gradient))

    waiting, waiting_bytes = [], 0
    for gradient in gradients:
        if waiting and waiting_bytes + gradient.nbytes > bucket_bytes:
            send(waiting)
            waiting, waiting_bytes = [], 0
        waiting.append(gradient)
        waiting_bytes += gradient.nbytes
    send(waiting)  # the last bucket is seldom full
