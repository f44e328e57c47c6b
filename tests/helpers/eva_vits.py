"""Small models with the rotary positions and attention pools of DINOv3, EVA-02, PE and SigLIP."""

from functools import partial

from timm.layers import AttentionPoolLatent
from timm.models.eva import Eva
from vits import vit

DINOV3 = {
    "use_abs_pos_emb": False, "use_rot_pos_emb": True, "rope_type": "dinov3", "rope_temperature": 100,
    "rope_rotate_half": True, "num_reg_tokens": 4, "init_values": 0.5, "qkv_bias": False, "dynamic_img_size": True,
    "use_fc_norm": False,
}  # fmt: skip
EVA02 = {
    "use_rot_pos_emb": True, "swiglu_mlp": True, "scale_mlp": True, "qkv_fused": False, "scale_attn_inner": True,
    "ref_feat_shape": (6, 6), "mlp_ratio": 8 / 3,
}  # fmt: skip
PE = {
    "attn_type": "rope", "use_rot_pos_emb": True, "rope_grid_indexing": "xy", "rope_grid_offset": 1.0,
    "use_pre_transformer_norm": True, "global_pool": "map", "attn_pool_num_heads": 4, "attn_pool_mlp_ratio": 4.0,
    "ref_feat_shape": (4, 4),
}  # fmt: skip
MIXED = {
    "attn_type": "rope", "use_rot_pos_emb": True, "rope_type": "mixed", "rope_grid_indexing": "xy",
    "no_embed_class": True, "init_values": 1e-1, "global_pool": "token", "rope_temperature": 10.0,
}  # fmt: skip

EVAS = {
    "DINOv3": partial(vit, Eva, **DINOV3),
    "EVA-02": partial(vit, Eva, **EVA02),
    "PE": partial(vit, Eva, **PE),
    "mixed": partial(vit, Eva, **MIXED),
    "mixed, whole offset": partial(vit, Eva, **MIXED | {"rope_grid_offset": 1}),
    "grouped queries": partial(
        vit, Eva, **DINOV3 | {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 2, "qk_norm": True}
    ),
    "norm after": partial(vit, Eva, use_post_norm=True, global_pool="token"),
    "odd grid": partial(vit, Eva, **EVA02 | {"img_size": (24, 40), "rope_grid_indexing": "xy"}),
}
SIGLIPS = {
    "SigLIP": partial(vit, class_token=False, global_pool="map"),
    "SigLIP with registers": partial(vit, class_token=False, reg_tokens=4, global_pool="map", pool_include_prefix=True),
}
KINDS = EVAS | SIGLIPS


def unfused(model):
    """Return the model with attention as separate matrix products, which a counter of operations can count."""
    for part in model.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = False
    assert model.attn_pool is None or isinstance(model.attn_pool, AttentionPoolLatent)
    return model
