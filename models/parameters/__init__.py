"""The parameters of a model: how they are made, adapted, quantized and used."""
