"""Fine-tune a timm Vision Transformer with a strategy: torchrun --nproc-per-node 2 fine_tune.py my-pictures"""

import argparse
import copy
import os

import timm
import torch
import torch.distributed as dist
from timm.data import ImageDataset, Mixup, create_loader, resolve_data_config
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch.nn.parallel import DistributedDataParallel

import sparsebench

parser = argparse.ArgumentParser()
parser.add_argument("pictures", help="folder with one folder for each class")
parser.add_argument("--arch", default="deit_tiny_patch16_224")
parser.add_argument("--strategy", default="evit:keep_rate=0.7")
parser.add_argument("--learned", help="random, or a file, for a strategy with learned parameters")
parser.add_argument("--checkpoint", default="", help="weights of the dense network")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch", type=int, default=64, help="batch size of each process")
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--out", default="sparse.pt")
args = parser.parse_args()

on_gpu = torch.cuda.is_available()
alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("nccl" if on_gpu else "gloo", **alone)
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
torch.manual_seed(0)

data = ImageDataset(args.pictures)
classes = len(data.reader.class_to_idx)
dense = timm.create_model(args.arch, num_classes=classes, checkpoint_path=args.checkpoint).to(device)
config = resolve_data_config({}, model=dense)
loader = create_loader(
    data, config["input_size"], args.batch, is_training=True, distributed=True, device=device, use_prefetcher=False,
    mean=config["mean"], std=config["std"], num_workers=0,
)  # fmt: skip
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=classes)
criterion = SoftTargetCrossEntropy()

sparse = sparsebench.apply(copy.deepcopy(dense), args.strategy, learned=args.learned)
sparse.teach(dense)
sparse.to(device).train()
average = ModelEmaV3(sparse.model, decay=0.99)
learned = [weight for name, weight in sparse.named_parameters() if name.startswith("strategy.")]
groups = [
    {"params": list(sparse.model.parameters()), "weight_decay": 0.05},
    *([{"params": learned}] if learned else []),
]
optimizer = create_optimizer_v2(groups, opt="adamw", lr=args.lr)
steps = args.epochs * len(loader)
schedule = CosineLRScheduler(optimizer, t_initial=steps, warmup_t=steps // 10)
network = DistributedDataParallel(sparse)

step = 0
for epoch in range(args.epochs):
    loader.sampler.set_epoch(epoch)
    for pixels, labels in loader:
        schedule.step_update(step)
        optimizer.param_groups[0]["lr"] *= sparse.progress(step / steps)
        pixels, targets = mixup(pixels.to(device), labels.to(device))
        with torch.autocast(device.type, torch.bfloat16):
            loss = criterion(network(pixels), targets) + sparse.loss()
            for logits in sparse.auxiliary():
                loss = loss + criterion(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(sparse.model)
        step += 1
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}, {sparse.macs_ratio:.3f} of the MACs", flush=True)
if dist.get_rank() == 0:
    torch.save({"state_dict": sparse.state_dict(), "ema": average.module.state_dict()}, args.out)
dist.destroy_process_group()
