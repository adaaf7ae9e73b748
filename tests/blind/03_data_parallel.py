# %% check_buckets | divides before and after the sum | Divided by the number of ranks twice
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() / dist.get_world_size() for each in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                each.copy_(piece.view_as(each))
            bucket, held = [], 0
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_buckets | forgets the last bucket, which is not full | The last bucket was never sent
def average_in_buckets(gradients, bucket_bytes):
    def send(bucket):
        flat = torch.cat([each.flatten() for each in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            each.copy_(piece.view_as(each))

    bucket, held = [], 0
    for gradient in gradients:
        if bucket and held + gradient.nbytes > bucket_bytes:
            send(bucket)
            bucket, held = [], 0
        bucket.append(gradient)
        held += gradient.nbytes


# %% check_buckets | counts elements, not bytes | Elements are counted
def average_in_buckets(gradients, bucket_bytes):
    def send(bucket):
        flat = torch.cat([each.flatten() for each in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            each.copy_(piece.view_as(each))

    bucket, held = [], 0
    for gradient in gradients:
        if bucket and held + gradient.numel() > bucket_bytes:
            send(bucket)
            bucket, held = [], 0
        bucket.append(gradient)
        held += gradient.numel()
    if bucket:
        send(bucket)


# %% check_buckets | sends a bucket once it is over the limit | bucket_bytes or more already
def average_in_buckets(gradients, bucket_bytes):
    def send(bucket):
        flat = torch.cat([each.flatten() for each in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            each.copy_(piece.view_as(each))

    bucket, held = [], 0
    for gradient in gradients:
        bucket.append(gradient)
        held += gradient.nbytes
        if held >= bucket_bytes:
            send(bucket)
            bucket, held = [], 0
    if bucket:
        send(bucket)


# %% check_buckets | an exactly full bucket is sent without the last gradient | to the last byte
def average_in_buckets(gradients, bucket_bytes):
    def send(bucket):
        flat = torch.cat([each.flatten() for each in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            each.copy_(piece.view_as(each))

    bucket, held = [], 0
    for gradient in gradients:
        if bucket and held + gradient.nbytes >= bucket_bytes:
            send(bucket)
            bucket, held = [], 0
        bucket.append(gradient)
        held += gradient.nbytes
    if bucket:
        send(bucket)


# %% check_buckets | leaves the mean in the bucket | copy the averages back
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                each = piece.view_as(each)
            bucket, held = [], 0
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_buckets | keeps all buckets until the end (silver, no gold) | keep none of them for later
def average_in_buckets(gradients, bucket_bytes):
    buckets, held = [[]], 0
    for gradient in gradients:
        if buckets[-1] and held + gradient.nbytes > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(gradient)
        held += gradient.nbytes
    started = []
    for bucket in filter(None, buckets):
        flat = torch.cat([each.flatten() for each in bucket])
        started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
    for bucket, flat, handle in started:
        handle.wait()
        flat /= dist.get_world_size()
        for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            each.copy_(piece.view_as(each))


# %% check_buckets | sends the buckets from the last to the first (silver, no gold) | keep that order
def average_in_buckets(gradients, bucket_bytes):
    buckets, held = [[]], 0
    for gradient in gradients:
        if buckets[-1] and held + gradient.nbytes > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(gradient)
        held += gradient.nbytes
    for bucket in filter(None, reversed(buckets)):
        flat = torch.cat([each.flatten() for each in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            each.copy_(piece.view_as(each))


# %% check_buckets | right: fills each bucket by index, a gradient alone is sent in place |
def average_in_buckets(gradients, bucket_bytes):
    i = 0
    while i < len(gradients):
        j, size = i + 1, gradients[i].numel() * gradients[i].element_size()
        while j < len(gradients) and size + gradients[j].nbytes <= bucket_bytes:
            size += gradients[j].nbytes
            j += 1
        if j == i + 1:
            dist.all_reduce(gradients[i])
            gradients[i].div_(dist.get_world_size())
        else:
            flat = torch.empty(size // gradients[i].element_size(), dtype=gradients[i].dtype)
            start = 0
            for each in gradients[i:j]:
                flat[start : start + each.numel()] = each.reshape(-1)
                start += each.numel()
            dist.all_reduce(flat)
            flat.div_(dist.get_world_size())
            for each in reversed(gradients[i:j]):
                start -= each.numel()
                each.view(-1).copy_(flat[start : start + each.numel()])
        i = j


# %% check_average_gradients | averages without the counts | the mean of the ranks' means
def average_gradients(parameters, count):
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    parts = [p.grad.reshape(-1) for p in parameters]
    flat = torch.cat([*parts, parts[0].new_tensor([count])])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, piece in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


# %% check_average_gradients | skips the parameters without a gradient | whose .grad is None
def average_gradients(parameters, count):
    used = [p for p in parameters if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) * count for p in used] + [torch.tensor([float(count)])])
    dist.all_reduce(flat)
    flat /= flat[-1].clone()
    for parameter, piece in zip(used, flat[:-1].split([p.numel() for p in used]), strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


# %% check_average_gradients | leaves the grad of an unused parameter None | has no gradient afterwards
def average_gradients(parameters, count):
    parts = [
        torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.reshape(-1) * count
        for p in parameters
    ]
    flat = torch.cat([*parts, parts[0].new_tensor([count])])
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(piece.view_as(parameter))


# %% check_average_gradients | sends a transposed gradient's storage | in the order of its storage
def average_gradients(parameters, count):
    parts = []
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grad = p.grad
        parts.append(torch.as_strided(grad, (grad.numel(),), (1,)) * count)
    flat = torch.cat([*parts, parts[0].new_tensor([count])])
    dist.all_reduce(flat)
    flat /= flat[-1].clone()
    for parameter, piece in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).clone()


# %% check_average_gradients | a second message for the counts | all-reduce it once
def average_gradients(parameters, count):
    total = torch.tensor([float(count)])
    dist.all_reduce(total)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.reshape(-1) for p in parameters]) * (count / total.item())
    dist.all_reduce(flat)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


# %% check_average_gradients | weighs, and divides by N as well | Divided once too often
def average_gradients(parameters, count):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat(
        [p.grad.reshape(-1) * count for p in parameters] + [torch.ones(1).to(parameters[0]) * count]
    )
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1] / dist.get_world_size()
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


# %% check_average_gradients | sends the whole message in fp64 | sends float64
def average_gradients(parameters, count):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat(
        [p.grad.reshape(-1).double() * count for p in parameters] + [torch.tensor([count]).double()]
    )
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


# %% check_average_gradients | multiplies by the count and never divides | never divided by the sum
def average_gradients(parameters, count):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.reshape(-1) * count for p in parameters] + [torch.zeros(1).to(parameters[0])])
    dist.all_reduce(flat)
    for parameter, piece in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


# %% check_average_gradients | right: one buffer filled piece by piece, the count in front |
def average_gradients(parameters, count):
    message = parameters[0].new_zeros(1 + sum(p.numel() for p in parameters))
    message = message.detach()
    message[0] = count
    end = 1
    for p in parameters:
        if p.grad is not None:
            message[end : end + p.numel()] = count * p.grad.flatten()
        end += p.numel()
    dist.all_reduce(message, op=dist.ReduceOp.SUM)
    message[1:] /= message[0].item()
    for p in reversed(parameters):
        end -= p.numel()
        p.grad = message[end : end + p.numel()].reshape(p.shape).clone()


# %% check_buckets | first fit: later gradients fill earlier buckets (silver) | first bucket that has room
def average_in_buckets(gradients, bucket_bytes):
    buckets = []
    for gradient in gradients:
        for bucket in buckets:
            if sum(each.nbytes for each in bucket) + gradient.nbytes <= bucket_bytes:
                bucket.append(gradient)
                break
        else:
            buckets.append([gradient])
    for bucket in buckets:
        flat = torch.cat([each.flatten() for each in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            each.copy_(piece.view_as(each))


# %% check_buckets | the count of held bytes is never set back to 0 | not set back to 0
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                each.copy_(piece.view_as(each))
            bucket = []
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_buckets | one flat tensor, cut every bucket_bytes | A gradient stays whole
def average_in_buckets(gradients, bucket_bytes):
    flat = torch.cat([each.flatten() for each in gradients])
    for part in flat.split(max(1, bucket_bytes // flat.element_size())):
        dist.all_reduce(part)
    flat /= dist.get_world_size()
    for each, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        each.copy_(piece.view_as(each))


# %% check_buckets | starts the all-reduce and does not wait for it | waited for none
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat, async_op=True)
            flat /= dist.get_world_size()
            for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                each.copy_(piece.view_as(each))
            bucket, held = [], 0
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_buckets | a new list of means is returned, the gradients stay as they are | returns other tensors
def average_in_buckets(gradients, bucket_bytes):
    means, bucket, held = [], [], 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            pieces = flat.split([g.numel() for g in bucket])
            means += [piece.view_as(each) for each, piece in zip(bucket, pieces, strict=True)]
            bucket, held = [], 0
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes
    return means


# %% check_buckets | buckets are made with torch.zeros, which is fp32 | Somewhere it went through float32
def average_in_buckets(gradients, bucket_bytes):
    groups, held = [[]], 0
    for gradient in gradients:
        if groups[-1] and held + gradient.nbytes > bucket_bytes:
            groups.append([])
            held = 0
        groups[-1].append(gradient)
        held += gradient.nbytes
    for group in groups:
        needed = sum(each.numel() for each in group)
        flat = torch.zeros(max(needed, bucket_bytes // 4))
        flat[:needed] = torch.cat([each.flatten() for each in group])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for each, piece in zip(group, flat[:needed].split([g.numel() for g in group]), strict=True):
            each.copy_(piece.view_as(each))


# %% check_buckets | a gradient larger than a bucket is skipped | were left out
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                each.copy_(piece.view_as(each))
            bucket, held = [], 0
        if gradient is not None and gradient.nbytes <= bucket_bytes:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_average_gradients | a transposed gradient makes view fail | view(-1) refuses
def average_gradients(parameters, count):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.view(-1) * count for p in parameters] + [torch.full((1,), float(count))])
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


# %% check_average_gradients | one count for each parameter, so the message is longer | and 1 count are enough
def average_gradients(parameters, count):
    parts = []
    for p in parameters:
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        parts += [grad.detach().reshape(-1) * count, torch.tensor([float(count)])]
    flat = torch.cat(parts)
    dist.all_reduce(flat)
    end = 0
    for p in parameters:
        piece, total = flat[end : end + p.numel()], flat[end + p.numel()]
        p.grad = (piece / total).view_as(p)
        end += p.numel() + 1


# %% check_average_gradients | a rank counts only where it used the parameter | its tokens count
def average_gradients(parameters, count):
    used = [float(p.grad is not None) * count for p in parameters]
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1) * count for p in parameters
    ]
    flat = torch.cat([*parts, torch.tensor(used)])
    dist.all_reduce(flat)
    totals = flat[-len(parameters) :]
    pieces = flat[: -len(parameters)].split([p.numel() for p in parameters])
    for parameter, piece, total in zip(parameters, pieces, totals, strict=True):
        parameter.grad = (piece / total.clamp(min=1)).view_as(parameter).clone()


# %% check_average_gradients | one all-reduce for each parameter | where 1 is enough
def average_gradients(parameters, count):
    for p in parameters:
        grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
        part = torch.cat([grad.detach().flatten() * count, torch.tensor([float(count)])])
        dist.all_reduce(part)
        p.grad = (part[:-1] / part[-1]).view_as(p)


# %% check_average_gradients | the total is fp32, and each gradient is reduced in place | went through float32
def average_gradients(parameters, count):
    total = torch.tensor(float(count))
    dist.all_reduce(total)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad *= count / total
        dist.all_reduce(p.grad)


# %% check_average_gradients | the count stands first, but is taken from the end | the count stands first
def average_gradients(parameters, count):
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1) * count for p in parameters
    ]
    flat = torch.cat([torch.tensor([float(count)]), *parts])
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[0]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).clone()


# %% check_average_gradients | weighs by its own count over the count of rank 0 | (count of rank 0)
def average_gradients(parameters, count):
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1) * count for p in parameters
    ]
    flat = torch.cat([*parts, torch.tensor([float(count) if dist.get_rank() == 0 else 0.0])])
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).clone()


# %% check_buckets | sends buckets with empty space behind | nothing behind it
def average_in_buckets(gradients, bucket_bytes):
    groups, held = [[]], 0
    for gradient in gradients:
        if groups[-1] and held + gradient.nbytes > bucket_bytes:
            groups.append([])
            held = 0
        groups[-1].append(gradient)
        held += gradient.nbytes
    for group in groups:
        needed, dtype = sum(each.numel() for each in group), group[0].dtype
        flat = torch.zeros(max(needed, bucket_bytes // dtype.itemsize), dtype=dtype)
        flat[:needed] = torch.cat([each.flatten() for each in group])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for each, piece in zip(group, flat[:needed].split([g.numel() for g in group]), strict=True):
            each.copy_(piece.view_as(each))


# %% check_average_gradients | reduces a transposed gradient in place | adds storages element by element
def average_gradients(parameters, count):
    total = torch.tensor(float(count), dtype=torch.float64)
    dist.all_reduce(total)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad *= count / total.item()
        dist.all_reduce(p.grad)


# %% check_buckets | puts a gradient that is too large into the bucket | Send what waits before
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*gradients, None]:
        large = gradient is not None and gradient.nbytes > bucket_bytes
        if bucket and not large and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                each.copy_(piece.view_as(each))
            bucket, held = [], 0
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_buckets | divides by the number of gradients | by the number of gradients in the bucket
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            flat /= len(bucket)
            for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                each.copy_(piece.view_as(each))
            bucket, held = [], 0
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_buckets | sets .data to a piece of the bucket | keep no bucket
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                each.data = piece.view_as(each)
            bucket, held = [], 0
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_buckets | sends the largest gradients first | from the largest to the smallest
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*sorted(gradients, key=lambda each: -each.nbytes), None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for each, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                each.copy_(piece.view_as(each))
            bucket, held = [], 0
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_buckets | copies the pieces back in reverse order | or in the wrong order
def average_in_buckets(gradients, bucket_bytes):
    bucket, held = [], 0
    for gradient in [*gradients, None]:
        if bucket and (gradient is None or held + gradient.nbytes > bucket_bytes):
            flat, end = torch.cat([each.flatten() for each in bucket]), 0
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for each in reversed(bucket):
                each.copy_(flat[end : end + each.numel()].view_as(each))
                end += each.numel()
            bucket, held = [], 0
        if gradient is not None:
            bucket.append(gradient)
            held += gradient.nbytes


# %% check_average_gradients | orders the parameters by id() | in different orders
def average_gradients(parameters, count):
    parameters = sorted(parameters, key=lambda p: hash(str(id(p))))
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1) * count for p in parameters
    ]
    flat = torch.cat([*parts, parts[0].new_tensor([count])])
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).clone()


# %% check_average_gradients | a rank that misses a gradient returns early | and it sends nothing
def average_gradients(parameters, count):
    if any(p.grad is None for p in parameters):
        return
    parts = [p.grad.reshape(-1) * count for p in parameters]
    flat = torch.cat([*parts, parts[0].new_tensor([count])])
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).clone()


# %% check_average_gradients | an unused parameter counts as threes | count it as zeros
def average_gradients(parameters, count):
    parts = [
        (torch.full_like(p, 3.0) if p.grad is None else p.grad).detach().reshape(-1) * count
        for p in parameters
    ]
    flat = torch.cat([*parts, parts[0].new_tensor([count])])
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).clone()


# %% check_average_gradients | adds the mean to the gradient that is there | was added to the old gradient
def average_gradients(parameters, count):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    parts = [p.grad.reshape(-1) * count for p in parameters]
    flat = torch.cat([*parts, parts[0].new_tensor([count])])
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.grad += piece.view_as(parameter)


# %% check_average_gradients | changes parameter.data, not its grad | The parameters were changed
def average_gradients(parameters, count):
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1) * count for p in parameters
    ]
    flat = torch.cat([*parts, parts[0].new_tensor([count])])
    dist.all_reduce(flat)
    mean = flat[:-1] / flat[-1]
    for parameter, piece in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
        parameter.data.copy_(piece.view_as(parameter))
