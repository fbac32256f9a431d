from conjoin.serving.limits import ItemError as ItemError, Limits as Limits
