-- Whose a result is, where it is a tenant's: the hash of the tenant. The row of the call may be dropped before its key is.
ALTER TABLE answers ADD COLUMN tenant TEXT;
