-- Progress goes by the lease, as everything that a worker says of a job; lists of workers say what blocks their loops.

drop function if exists penstock.report_progress(uuid[], smallint[], jsonb[]);
drop function if exists penstock.worker_list();
