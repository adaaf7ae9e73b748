"""Modules that torch brings along."""

import torch
from torch import nn

from support.training import WIDTH
from support.user_models import Block, Net, cases, squares

case = cases()


@case
def multihead_attention():
    class Attention(Block):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x):
            x = x[None]
            return super().forward(self.attention(x, x, x, need_weights=False)[0])[0]

    return lambda: Net(Attention), squares


@case
def a_transformer_encoder_with_dropout():
    def build():
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 3))

    def losses(model, x, step):
        yield model(x[None]).square().mean()
        model.eval()
        with torch.no_grad():
            model(x[None])
        model.train()

    return build, losses


@case
def a_transformer_with_a_padding_mask():
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x):
            padding = torch.zeros(1, len(x), dtype=torch.bool, device=x.device)
            padding[0, -1] = True
            return self.transformer(x[None], x[None], src_key_padding_mask=padding)

    def losses(model, x, step):
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        yield model(x).square().mean()

    return Translator, losses


@case
def recurrent_layers():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2), nn.GRU(WIDTH, WIDTH, bidirectional=True)])
            self.cell = nn.GRUCell(2 * WIDTH, WIDTH)

        def forward(self, x):
            x, (hidden, _) = self.layers[0](x)
            packed = nn.utils.rnn.pack_sequence([x, x[:2]])
            packed, _ = self.layers[1](packed)
            x, _ = nn.utils.rnn.pad_packed_sequence(packed)
            return self.cell(x.mean(0)) + hidden.mean()

    return Recurrent, squares


@case
def convolutions_and_batch_norm():
    def build():
        block = lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())
        return nn.Sequential(nn.Conv1d(1, 4, 3), block(), block(), nn.Flatten(), nn.LazyLinear(3))

    def initialised():
        model = build()
        model(torch.zeros(2, 1, WIDTH))
        return model

    def losses(model, x, step):
        yield model(x[:, None]).square().mean()

    return initialised, losses


@case
def weight_norm_and_spectral_norm():
    class Normed(Block):
        def __init__(self):
            super().__init__()
            nn.utils.parametrizations.weight_norm(self.first)
            nn.utils.parametrizations.spectral_norm(self.second)

    return lambda: Net(Normed), squares


@case
def a_parametrization_with_parameters_of_its_own():
    class LowRank(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(12, 2))

        def forward(self, weight):
            return weight + self.up @ self.down

    class Adapted(Net):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                nn.utils.parametrize.register_parametrization(block.first, "weight", LowRank())

    return Adapted, squares


@case
def one_layer_parametrized_outside_of_any_list():
    class Orthogonal(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
            self.out = nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.out(self.mix(x))

    return Orthogonal, squares
