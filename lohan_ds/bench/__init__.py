"""`lohan bench`: lohan beside plain torch, FSDP2 and DeepSpeed: same model, tokens, precision and clipping."""
