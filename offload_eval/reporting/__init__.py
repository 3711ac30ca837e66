"""Tables, sentences and reports. Everything here is made from records alone."""
