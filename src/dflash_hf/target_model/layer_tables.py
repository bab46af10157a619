"""This module lists the classes of Transformers that have a fast form by name, and the formula of each kind."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# `weight * x / rms(x)`, rounded before the weight.
NORMS = _names("""
    AXK1RMSNorm AXK2RMSNorm Apertus1p5TextRMSNorm ApertusRMSNorm ArceeRMSNorm AriaTextRMSNorm BailingHybridRMSNorm
    BambaRMSNorm BitNetRMSNorm CwmRMSNorm DeepseekV2RMSNorm DeepseekV32RMSNorm DeepseekV3RMSNorm DiffLlamaRMSNorm
    DogeRMSNorm Dots1RMSNorm Ernie4_5RMSNorm Ernie4_5_MoeRMSNorm Exaone4RMSNorm ExaoneMoeRMSNorm FalconH1RMSNorm
    Glm4MoeLiteRMSNorm Glm4MoeRMSNorm Glm4RMSNorm GlmMoeDsaRMSNorm GlmRMSNorm GraniteMoeHybridRMSNorm
    GraniteMoeRMSNorm GraniteMoeSWARMSNorm GraniteMoeSharedRMSNorm GraniteRMSNorm GraniteSWARMSNorm HYV3RMSNorm
    HYV4RMSNorm HunYuanDenseV1RMSNorm HunYuanMoEV1RMSNorm HyperCLOVAXRMSNorm InklingRMSNorm JetMoeRMSNorm
    KimiLinearRMSNorm Kolibri1RMSNorm LagunaRMSNorm Lfm2MoeRMSNorm Lfm2RMSNorm Llama4TextRMSNorm LlamaRMSNorm
    MellumRMSNorm MiMoV2FlashRMSNorm MiniCPM3RMSNorm MiniMaxM2RMSNorm MiniMaxRMSNorm Ministral3RMSNorm
    MinistralRMSNorm MistralRMSNorm MixtralRMSNorm OlmoeRMSNorm Phi3RMSNorm Qwen2MoeRMSNorm Qwen2RMSNorm
    Qwen2VLRMSNorm Qwen2_5_VLRMSNorm Qwen3MoeRMSNorm Qwen3RMSNorm Qwen3VLMoeTextRMSNorm Qwen3VLTextRMSNorm
    SeedOssRMSNorm SmolLM3RMSNorm SolarOpenRMSNorm YoutuRMSNorm ZayaRMSNorm
""")
# `down(silu(gate(x)) * up(x))`.
GATED_MLPS = _names("""
    AXK1MLP AXK2MLP AfmoeMLP AriaSharedExpertsMLP BailingHybridMLP BambaMLP Cohere2MLP CohereMLP CwmMLP
    DeepseekV2MLP DeepseekV32MLP DeepseekV3MLP DiffLlamaMLP DogeMLP Dots1MLP Ernie4_5MLP Ernie4_5_MoeMLP
    Exaone4MLP ExaoneMoeMLP FalconH1MLP FlintMLP Glm4MoeLiteMLP Glm4MoeMLP GlmMoeDsaMLP GraniteMLP GraniteSWAMLP
    HYV3MLP HYV4MLP HeliumMLP HunYuanDenseV1MLP HunYuanMoEV1MLP HyperCLOVAXMLP KimiLinearMLP Kolibri1MLP LagunaMLP
    LaraMiniMLP LlamaMLP MellumMLP MiMoV2FlashMLP MiniCPM3MLP Ministral3MLP MinistralMLP MistralMLP Olmo2MLP
    Olmo3MLP OlmoHybridMLP OlmoMLP OlmoeMLP Qwen2MLP Qwen2MoeMLP Qwen3MLP Qwen3MoeMLP Qwen3NextMLP
    Qwen3VLMoeTextMLP Qwen3VLTextMLP Qwen3_5MLP Qwen3_5MoeMLP SeedOssMLP SmolLM3MLP SolarOpenMLP StableLmMLP
    YoutuMLP
""")
# The attention of Llama, and that of Qwen3 with norms of queries and keys: RoPE on whole heads, no caps, no sinks.
ATTENTIONS = _names("""
    Apertus1p5TextAttention ApertusAttention ArceeAttention AriaTextAttention BambaAttention CwmAttention
    Dots1Attention Exaone4Attention ExaoneMoeAttention FalconH1Attention GemmaAttention Glm4MoeAttention
    GraniteAttention GraniteMoeAttention GraniteMoeHybridAttention GraniteMoeSharedAttention HYV3Attention
    HyperCLOVAXAttention Jais2Attention Kolibri1Attention LlamaAttention MellumAttention MiniMaxAttention
    MinistralAttention MistralAttention MixtralAttention NemotronAttention OlmoAttention PhimoeAttention
    Qwen2Attention Qwen2MoeAttention Qwen2VLAttention Qwen2_5_VLAttention Qwen3Attention Qwen3MoeAttention
    Qwen3VLMoeTextAttention Qwen3VLTextAttention SeedOssAttention SmolLM3Attention SolarOpenAttention
    Starcoder2Attention
""")
# `h = x + attention(norm(x))`, then `h + mlp(norm(h))`.
LAYERS = _names("""
    AXK1DecoderLayer ArceeDecoderLayer AriaTextDecoderLayer BitNetDecoderLayer CwmDecoderLayer
    DeepseekV2DecoderLayer DeepseekV32DecoderLayer DeepseekV3DecoderLayer DiffLlamaDecoderLayer Dots1DecoderLayer
    Ernie4_5DecoderLayer Ernie4_5_MoeDecoderLayer ExaoneMoeDecoderLayer Glm4MoeDecoderLayer
    Glm4MoeLiteDecoderLayer GlmDecoderLayer GraniteDecoderLayer GraniteSWADecoderLayer HYV3DecoderLayer
    HunYuanDenseV1DecoderLayer HunYuanMoEV1DecoderLayer LagunaDecoderLayer LlamaDecoderLayer MellumDecoderLayer
    MiMoV2FlashDecoderLayer MiniMaxM2DecoderLayer Ministral3DecoderLayer MinistralDecoderLayer MistralDecoderLayer
    MixtralDecoderLayer OlmoeDecoderLayer Qwen2DecoderLayer Qwen2MoeDecoderLayer Qwen2VLDecoderLayer
    Qwen2_5_VLDecoderLayer Qwen3DecoderLayer Qwen3MoeDecoderLayer Qwen3VLMoeTextDecoderLayer
    Qwen3VLTextDecoderLayer SeedOssDecoderLayer SmolLM3DecoderLayer SolarOpenDecoderLayer YoutuDecoderLayer
""")
# Cosines and sines of `position * inv_freq`, which are the same for both halves of a head.
ROTARIES = _names("""
    AXK1RotaryEmbedding AXK2RotaryEmbedding AfmoeRotaryEmbedding Apertus1p5TextRotaryEmbedding
    ApertusRotaryEmbedding ArceeRotaryEmbedding AriaTextRotaryEmbedding BailingHybridRotaryEmbedding
    BambaRotaryEmbedding BitNetRotaryEmbedding CwmRotaryEmbedding DeepseekV32RotaryEmbedding
    DeepseekV3RotaryEmbedding DiffLlamaRotaryEmbedding DogeRotaryEmbedding Dots1RotaryEmbedding
    Exaone4RotaryEmbedding ExaoneMoeRotaryEmbedding FalconH1RotaryEmbedding FlintRotaryEmbedding
    GemmaRotaryEmbedding Glm4MoeLiteRotaryEmbedding Glm4MoeRotaryEmbedding Glm4RotaryEmbedding
    GlmMoeDsaRotaryEmbedding GlmRotaryEmbedding GraniteMoeHybridRotaryEmbedding GraniteMoeRotaryEmbedding
    GraniteMoeSWARotaryEmbedding GraniteMoeSharedRotaryEmbedding GraniteRotaryEmbedding GraniteSWARotaryEmbedding
    HYV3RotaryEmbedding HYV4RotaryEmbedding HeliumRotaryEmbedding HunYuanDenseV1RotaryEmbedding
    HunYuanMoEV1RotaryEmbedding HyperCLOVAXRotaryEmbedding Jais2RotaryEmbedding JetMoeRotaryEmbedding
    Kolibri1RotaryEmbedding LaraMiniRotaryEmbedding Lfm2MoeRotaryEmbedding Lfm2RotaryEmbedding LlamaRotaryEmbedding
    MiniCPM3RotaryEmbedding MiniMaxM2RotaryEmbedding MiniMaxRotaryEmbedding Ministral3RotaryEmbedding
    MinistralRotaryEmbedding MistralRotaryEmbedding MixtralRotaryEmbedding NemotronRotaryEmbedding
    OlmoeRotaryEmbedding Phi3RotaryEmbedding Qwen2MoeRotaryEmbedding Qwen2RotaryEmbedding Qwen3MoeRotaryEmbedding
    Qwen3NextRotaryEmbedding Qwen3RotaryEmbedding SeedOssRotaryEmbedding SmolLM3RotaryEmbedding
    SolarOpenRotaryEmbedding StableLmRotaryEmbedding Starcoder2RotaryEmbedding YoutuRotaryEmbedding
""")
# Activations of gated MLPs, of torch and of Transformers.
SILUS = _names("SiLU SiLUActivation")
