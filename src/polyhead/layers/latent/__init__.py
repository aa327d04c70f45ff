"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2")."""
