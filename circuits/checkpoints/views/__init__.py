"""Files of weights seen in another way: by other names, or with the weights that their parts make up."""
